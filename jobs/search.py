"""Run the search stage as a Ray job: `ray job submit --working-dir . -- python jobs/search.py CONFIG [options]`."""

from mixednuts_dist.cli import search

if __name__ == "__main__":
    search()
