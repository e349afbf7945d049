"""The service behind python -m ltx_neuron.serve: a durable queue, the API that fills it, and the
workers that empty it.

queue.py    every job and its state, in a database that outlives all processes
fields.py   from a request's fields to a job's line; catalogue.py: the sizes that are compiled
worker.py   one process that keeps the engine up and takes jobs of one size together
page.py     the page at /; preview.py: what a video looks like between two steps
app.py      /v1/videos for OpenAI's client and others; guard.py and tokens.py: who may, and how much
"""
