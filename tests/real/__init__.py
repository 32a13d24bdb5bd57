"""Other projects' clients and readers against dtrain: one program each, which tools/check_servers --clients runs.

pytest collects none of them. A program ends with 0, with 1 where a check failed, and with 77 where its package lacks.
"""
