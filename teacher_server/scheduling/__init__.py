"""Who gets in, who waits, who runs together. Knows neither protocol nor model."""
