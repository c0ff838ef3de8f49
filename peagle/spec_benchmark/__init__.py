"""`peagle bench spec`: what speculation brings, in process, each way of drafting on the same prompts."""
