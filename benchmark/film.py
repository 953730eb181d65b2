"""Makes a small animated picture, which every browser and GitHub show, of the video of an evaluation.

    python algos/ppo.py --evaluate runs/demo --capture-video --eval-episodes 1
    python benchmark/film.py runs/demo/videos/50000-seed10000000.webm --out docs/img/film_ppo.webp

It keeps the pace: where the video has more frames in a second, some are left out.
"""

import argparse
import sys
from pathlib import Path

import cv2


def read(film: Path, width: int, fps: int, seconds: float) -> list:
    """The frames, as wide and as many a second as wanted, from the beginning."""
    video, frames, taken = cv2.VideoCapture(str(film)), [], 0
    rate = video.get(cv2.CAP_PROP_FPS)
    while len(frames) < seconds * fps:
        there, frame = video.read()
        if not there:
            break
        taken += 1
        if taken * min(fps, rate) >= (len(frames) + 1) * rate:
            size = width, round(width * frame.shape[0] / frame.shape[1])
            frames.append(cv2.resize(frame, size, interpolation=cv2.INTER_AREA))
    return frames


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("film", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="NAME.webp")
    parser.add_argument("--width", type=int, default=300, help="in pixels")
    parser.add_argument("--fps", type=int, default=20, help="frames in a second, no more than the film has")
    parser.add_argument("--seconds", type=float, default=8, help="of the film, at most")
    args = parser.parse_args()
    frames = read(args.film, args.width, args.fps, args.seconds)
    if not frames:
        sys.exit(f"film.py: {args.film} has no frame")
    rate = min(args.fps, cv2.VideoCapture(str(args.film)).get(cv2.CAP_PROP_FPS))
    animation = cv2.Animation()
    animation.frames, animation.durations = frames, [round(1000 / rate)] * len(frames)
    cv2.imwriteanimation(str(args.out), animation, [cv2.IMWRITE_WEBP_QUALITY, 60])
    print(f"{args.out}: {len(frames)} frames, {args.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
