"""HTTP: our protocol and lmms-eval's, access control, and the page."""
