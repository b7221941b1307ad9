"""`python -m mixednuts_dist`: the command `mixednuts`, where only the package travels to a machine."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="mixednuts")
