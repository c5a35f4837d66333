"""The reward: the share of letters in an answer."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    letters = sum(character.isalpha() for character in solution_str)
    return letters / max(len(solution_str), 1)
