"""`python -m teacher_server` is `teacher-server`."""

import sys

from teacher_server.cli import main

if __name__ == "__main__":
    sys.exit(main())
