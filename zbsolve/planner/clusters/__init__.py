"""Clusters: what devices and links do, from data sheets, files and measurements."""
