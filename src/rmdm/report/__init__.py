"""`rmdm report`: everything measured of some runs on one page."""
