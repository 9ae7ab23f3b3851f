# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Fetches a URL into a file: `fetch.py URL FILE`; with the module requests where it is
installed."""

import sys

try:
    import requests

    body = requests.get(sys.argv[1], timeout=60).content
except ImportError:
    import urllib.request

    body = urllib.request.urlopen(sys.argv[1], timeout=60).read()

with open(sys.argv[2], "wb") as to:
    to.write(body)
