"""What envs/webarena.py is made of: the browser, the scores, the bundled sites and their tasks."""
