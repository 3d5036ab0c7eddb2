"""Every picture of the course: one module a phase, one function a picture, one look (see style)."""
