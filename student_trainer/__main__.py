"""`python -m student_trainer` is `student-trainer`; torchrun starts the ranks this way."""

import sys

from student_trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
