# SPDX-License-Identifier: Apache-2.0
"""python -m flash3.bench run | plot"""
import argparse
import pathlib
import sys

import flash3.bench


def _numbers(text):
    return [int(number) for number in text.split(",")]


def _parser():
    parser = argparse.ArgumentParser(prog="python -m flash3.bench", description=flash3.bench.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure, write JSON, and draw it")
    run.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    run.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    run.add_argument("--backward", action="store_true", help="the gradients instead of the forward")
    run.add_argument("--peers", help="names with commas (default: all that are installed)")
    run.add_argument("--dims", type=_numbers, default=[64, 128, 256])
    run.add_argument("--seqs", type=_numbers, help="default: 512 to 16384, on a CPU 512 to 2048")
    run.add_argument("--samples", type=int, default=11)
    run.add_argument("--sample-ms", type=float, default=12.0)
    run.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."), help="folder for the results")
    plot = commands.add_parser("plot", help="draw measurements as SVG")
    plot.add_argument("results", nargs="+", type=pathlib.Path, help="JSON files, or folders of them")
    plot.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."), help="folder for the pictures")
    return parser


def _plot(args):
    from .plot import draw_all
    files = [file for path in args.results for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        raise SystemExit(f"there is no file {', '.join(missing) or 'to draw'}")
    try:
        written, skipped = draw_all(files, args.out)
    except ValueError as problem:
        raise SystemExit(str(problem)) from None
    print("\n".join(str(path) for path in written))
    for path in skipped:
        print(f"{path} holds nothing that is drawn: no points of speed, of error or of memory, and no trace of a kernel", file=sys.stderr)
    return not written


def _run(args):
    import torch

    from . import measure
    from .plot import draw_report
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    seqs = args.seqs or ([512, 1024, 2048, 4096, 8192, 16384] if device == "cuda" else [512, 1024, 2048])
    try:
        functions, missing = measure.find(device, args.peers.split(",") if args.peers else None, args.backward)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    for name, why in missing.items():
        print(f"no {name}: {why}")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{'backward' if args.backward else 'forward'}_{args.dtype}_{device}.json"
    report = measure.run(functions, measure.suite(device, args.dims, seqs), path, dtype=args.dtype, device=device,
                         backward=args.backward, samples=args.samples, sample_ms=args.sample_ms)
    print(path)
    print("\n".join(str(file) for file in draw_report(report, path.with_suffix(""))))
    return not any("flash3" in point["tflops"] for point in report["points"])


def main(arguments=None):
    args = _parser().parse_args(arguments)
    return (_run if args.command == "run" else _plot)(args)


if __name__ == "__main__":
    sys.exit(main())
