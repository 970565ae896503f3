"""CSA2 inside other libraries, without SGLang."""
