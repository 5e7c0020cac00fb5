import sys

from efla.cli import main

sys.exit(main())
