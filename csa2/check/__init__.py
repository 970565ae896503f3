"""What a compressed format costs in quality: metrics, prompts, reports. The engines are run by `sglang_csa2.check`."""
