"""HTTP: our protocol and lmms-eval's, who may connect and how often."""
