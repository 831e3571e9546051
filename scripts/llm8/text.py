"""Numbers as people read them."""

import math


def fixed(value, digits=4):
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def counted(value):
    return f"{value:,.0f}" if math.isfinite(value) else "-"


def memory(value):
    return f"{value / 2**20:,.0f} MiB" if value < 2**30 else f"{value / 2**30:,.2f} GiB"


def duration(seconds):
    if not math.isfinite(seconds):
        return "-"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02}" if hours < 48 else f"{hours // 24} d {hours % 24} h"
