"""Figures as text: what every table of a report shares."""


def fixed(value, places):
    """A number to so many places, or a dash."""
    return "–" if value is None else f"{value:.{places}f}"


def ratio(speedup):
    """A speedup's two cells: the ratio, and its interval, or its range in words below ten prompts."""
    if speedup is None:
        return ["–", "–"]
    if speedup["low"] is None:
        return [fixed(speedup["ratio"], 3), "range {:.2f}–{:.2f}".format(*speedup["range"])]
    return [fixed(speedup["ratio"], 3), f"{speedup['low']:.3f}–{speedup['high']:.3f}"]


def estimate(found, places=3):
    """The two cells of a `statistics.estimate`: its value, and its interval or why there is none."""
    if found is None:
        return ["–", "–"]
    if found["low"] is None:
        return [fixed(found["value"], places), f"{found['prompts']} prompts"]
    return [fixed(found["value"], places), f"{found['low']:.{places}f}–{found['high']:.{places}f}"]
