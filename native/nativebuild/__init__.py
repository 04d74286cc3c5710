"""Builds what llamasrv needs below Python: the pinned llama.cpp libraries, the bridge and the cffi module.

Standard library only: it runs before anything is installed.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - the one place that an older Python reaches
    sys.exit("llamasrv: error: Python 3.10 or newer is needed; run this with another one than %s." % sys.executable)  # noqa: UP031
