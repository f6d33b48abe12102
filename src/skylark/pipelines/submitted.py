"""What spark-submit runs: `submitted.py FILE [--once]`. Master and settings come from the call, those of FILE too."""

import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    from skylark.pipelines import spec
    from skylark.pipelines.errors import Mistakes, PipelineError
    from skylark.pipelines.running import run
    from skylark.pipelines.session import session

    once = "--once" in arguments
    (file,) = [argument for argument in arguments if argument != "--once"]
    try:
        declared = spec.read(Path(file))
        with session(None, declared.pipeline.name) as spark:
            run(declared, spark, once=once)
    except PipelineError as e:
        for mistake in e.errors if isinstance(e, Mistakes) else (e,):
            print("skylark:", mistake, file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    # Running a file puts its directory in front, where modules of Skylark would hide those of the same name.
    sys.path.remove(str(Path(__file__).parent.resolve()))
    sys.exit(main(sys.argv[1:]))
