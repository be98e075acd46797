"""The last output of each of a job's prompts, for answers that are not streamed."""

from __future__ import annotations

from ambidex.engine.output import RequestOutput
from ambidex.server.errors import ApiError
from ambidex.server.state import Job


async def collect(job: Job) -> list[RequestOutput]:
    """One output a prompt, in the prompts' order; each holds everything."""
    last: list[RequestOutput | None] = [None] * len(job.streams)
    async for index, output in job.outputs():
        last[index] = output
    whole = [output for output in last if output is not None]
    if len(whole) < len(last):
        raise ApiError(500, "The engine ended a request without an output.")
    return whole
