"""Programs that use ckptd the way its users do."""
