"""Connections of kvtier to LLM engines, one subpackage per engine; each imports its engine."""
