"""What runs when a process loads SGLang: ``environ`` and ``cache`` hook the modules so named."""
