"""The plan as a person reads it on a terminal."""

from ltx_neuron.plan import ASSUMED, Plan


def table(plan: Plan) -> str:
    """The plan in columns. 1 GB is 1e9 bytes."""

    def gb(count: int | None) -> str:
        return "-" if count is None else f"{count / 1e9:.2f} GB"

    def ms(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f} ms"

    lines = [f"profile {plan.profile}, tp {plan.tp}, {plan.dtype}", ""]
    for stage in plan.stages:
        reduced = stage.collectives_per_step
        lines += [
            (
                f"{stage.name}: {stage.height}x{stage.width}, {stage.steps} steps,"
                f" {stage.video_tokens:,} video and {stage.audio_tokens} audio tokens"
            ),
            f"  FLOPs per step        {stage.flops_per_step / 1e12:.1f} T",
            (
                f"  ideal step            {ms(stage.ideal_step_ms)} "
                f" (compute {ms(stage.compute_ms)}, weights {ms(stage.memory_ms)};"
                f" collectives {ms(stage.collectives_ms)} if not hidden)"
            ),
            f"  collectives per step  {reduced['count']}, {gb(reduced['bytes'])} a rank",
            f"  activations a core    {gb(stage.activation_bytes_per_core)}",
            (
                f"  to the device         {gb(stage.upload_bytes)} a rank once,"
                f" {stage.bytes_to_device_per_step} bytes a step"
            ),
        ]
    mapped = []
    if plan.host_bytes_mapped:
        text = f"weights as files' pages {gb(plan.host_bytes_mapped)}: what memory has no room for"
        mapped = [f"{text} is read from the disk again"]
    lines += [
        "",
        (
            f"DiT weights a core      {gb(plan.dit_weight_bytes_per_rank)} (blocks"
            f" {gb(plan.block_weight_bytes_per_rank)})"
        ),
        f"Gemma3 weights a core   {gb(plan.gemma3_weight_bytes_per_rank)}",
        (
            f"memory a core           {gb(plan.hbm_bytes_per_core)} in turn,"
            f" {gb(plan.hbm_bytes_per_core_resident)} both resident, of"
            f" {gb(plan.hbm_limit_bytes_per_core)}"
        ),
        (
            f"host memory             {gb(plan.host_bytes_to_load)} to load,"
            f" {gb(plan.host_bytes_to_decode)} to decode, of {gb(plan.host_limit_bytes)}"
        ),
        *mapped,
        f"disk for rank files     {gb(plan.disk_bytes)}",
        (
            f"assumed                 {gb(ASSUMED['runtime_bytes_per_core'])} a core for graphs and"
            f" runtime; {ASSUMED['sdpa']}"
        ),
    ]
    return "\n".join([*lines, f"verdict                 {_verdict(plan)}"])


def _verdict(plan: Plan) -> str:
    """Whether it fits, and what else would."""
    verdict = {
        True: "fits",
        False: "does not fit",
        None: "this profile has no documented memory to compare with",
    }
    nearest = f"; the nearest that does: {plan.nearest_that_fits}" if plan.nearest_that_fits else ""
    nearest = nearest or ("; no length of that size does" if plan.fits is False else "")
    resident = (
        " (both models resident as well)"
        if plan.fits_resident
        else " (one model at a time)"
        if plan.fits
        else ""
    )
    return f"{verdict[plan.fits]}{resident}{nearest}"
