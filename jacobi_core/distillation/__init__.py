"""Progressive distillation: noise schedule -> packed noisy/clean rows -> noise-aware causal attention -> losses."""
