"""What runs when a process loads SGLang: one module here for each SGLang module that is hooked."""
