"""Run a study as a Ray job: `ray job submit --working-dir . -- python jobs/study.py NAME CONFIG [options]`."""

from mixednuts_dist.cli import study

if __name__ == "__main__":
    study()
