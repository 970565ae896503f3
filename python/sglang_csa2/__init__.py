"""The SGLang plugin: the only code that imports sglang. Entry points are `plugin` and `platform`."""
