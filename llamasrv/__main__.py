import sys

from llamasrv.cli.main import main

sys.exit(main())
