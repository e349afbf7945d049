"""The service behind ltx-neuron serve: a durable queue, the API, and the workers.

app.py      the routes of /v1/videos, for OpenAI's client and others
settings.py the limits, each a flag of serve; limits.py: those of requests before they are read
tokens.py   bearer tokens; api_error.py: errors
openapi.py  /openapi.json; reference.py: the same as a page, /docs
fields.py   a request's fields; sizes.py: its compiled size; jobs.py: its job
picture.py  uploaded images; media.py: sounds and videos; sandbox.py: the process that decodes them
queue.py    every job and its state, in a database that outlives all processes (database.py)
worker.py   a process that keeps an engine open and runs jobs
server.py   the API's process, which supervises a worker
page.py     the page at /; preview.py: a picture of the video between two steps
"""
