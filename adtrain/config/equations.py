"""The equations of a config, parsed, and their check against its variables, outputs and coefficients."""

from __future__ import annotations

from collections.abc import Mapping

from adtrain.config.document import Config
from adtrain.config.problems import ConfigError, PathParts, Problem, dotted, known, similar
from adtrain.config.specs import Term
from adtrain.equations import (
    FUNCTIONS,
    PI,
    EquationError,
    Expression,
    Name,
    Names,
    derivatives,
    parse,
    parts,
)


def names(cfg: Config) -> Names:
    """The names that the equations of a config may have.

    Raises ConfigError if `data.points`, `model.input` and `model.output` do not fit together, or a name has two
    meanings.
    """
    model, points = cfg.model, cfg.data.points
    if points is None:
        raise cfg.error_at(
            ("loss",), "found equations without data.points, expected data.points with the interval of each variable"
        )
    if not model.variables:
        listed = ", ".join(points)
        raise cfg.error_at(
            ("model", "input"), f"found no names of variables, expected those of data.points for equations: [{listed}]"
        )
    if set(points) != set(model.variables) or len(set(model.variables)) != len(model.variables):
        found = f"found [{', '.join(model.variables)}], expected the variables of data.points, each once"
        raise cfg.error_at(("model", "input"), f"{found}: {', '.join(points)}")
    if model.output is None:
        raise cfg.error_at(
            ("model",), "found no model.output, expected the names of the outputs, such as [u], for equations"
        )
    used: dict[str, str] = {PI: "a number", **dict.fromkeys(FUNCTIONS, "a function")}
    given = {
        "input": dict.fromkeys(model.variables, "a variable"),
        "output": dict.fromkeys(model.output, "an output"),
        "coefficients": dict.fromkeys(model.coefficients or {}, "a coefficient"),
    }
    for key, meanings in given.items():
        for name, meaning in meanings.items():
            if name in used:
                raise cfg.error_at(("model", key), f"found {name}, which is {used[name]}, expected another name")
            used[name] = meaning
    if len(set(model.output)) != len(model.output):
        raise cfg.error_at(("model", "output"), f"found [{', '.join(model.output)}], expected each name once")
    return Names(model.variables, model.output, tuple(model.coefficients or ()))


def expressions(cfg: Config, terms: list[Term]) -> list[Expression]:
    """The parsed equations of a config. Raises ConfigError with the problems of all terms."""
    known_names = names(cfg)
    problems: list[Problem] = []
    found: list[Expression] = []
    for i, term in enumerate(terms):
        path: PathParts = ("loss", i)
        try:
            found.append(_parsed(cfg, (*path, "equation"), term.equation, known_names))
        except ConfigError as error:
            problems += error.problems
        problems += _problems_of_places(cfg, (*path, "at"), term)
    if not problems:
        problems = _without_conditions(cfg, terms, found, known_names)
    if problems:
        raise ConfigError(problems)
    used = {part.name for each in found for part in parts(each) if isinstance(part, Name)}
    if unused := [name for name in known_names.coefficients if name not in used]:
        raise cfg.error_at(
            ("model", "coefficients"),
            f"found {unused[0]}, which is in no equation, expected coefficients of the equations only",
        )
    return found


def reference(cfg: Config) -> list[Expression]:
    """The expressions of `data.reference`, one for each output; none if it is a file or missing.

    Raises ConfigError for mistakes in them.
    """
    given = cfg.data.reference
    if given is None or cfg.data.reference_file is not None:
        return []
    own = names(cfg)
    path: PathParts = ("data", "reference")
    if isinstance(given, str):
        if len(own.outputs) > 1:
            outputs = ", ".join(own.outputs)
            raise cfg.error_at(path, f"found one expression, expected a mapping with one for each of {outputs}")
        return [_parsed(cfg, path, given, Names(own.variables))]
    if set(given) != set(own.outputs):
        raise cfg.error_at(
            path, f"found {', '.join(given)}, expected one expression for each of {', '.join(own.outputs)}"
        )
    return [_parsed(cfg, (*path, name), given[name], Names(own.variables)) for name in own.outputs]


def _parsed(cfg: Config, path: PathParts, text: str, own: Names) -> Expression:
    try:
        return parse(text, own)
    except EquationError as error:
        raise ConfigError([_problem(cfg, path, error)]) from None


def _problem(cfg: Config, path: PathParts, error: EquationError) -> Problem:
    message = error.reason
    if error.known is not None:
        name = message.rpartition(" ")[2]
        message += f"; {similar(name, error.known) or known(name, error.known)}"
    return Problem(cfg.where(path), dotted(path), message, excerpt=error.excerpt)


def _problems_of_places(cfg: Config, path: PathParts, term: Term) -> list[Problem]:
    """A problem for each name in `at` that is not a variable, and for each value outside its interval."""
    intervals: Mapping[str, tuple[float, float]] = cfg.data.points or {}
    problems = []
    for name, values in term.fixed.items():
        where = cfg.where((*path, name)), dotted((*path, name))
        if name not in intervals:
            problems.append(Problem(*where, f"unknown variable; {known(name, intervals, 'variables')}"))
            continue
        low, high = intervals[name]
        if outside := [x for x in values if not low <= x <= high]:
            expected = f"expected a number in data.points.{name}, [{low:g}, {high:g}]"
            problems.append(Problem(*where, f"found {outside[0]:g}, {expected}"))
    return problems


def _without_conditions(cfg: Config, terms: list[Term], found: list[Expression], own: Names) -> list[Problem]:
    """A problem for each variable by which an equation without `at` has a derivative of a higher order than the number
    of values at which `at` fixes it."""
    if cfg.data.point_options.has_measurements:
        return []
    problems = []
    for name in own.variables:
        count = sum(len(term.fixed.get(name, ())) for term in terms)
        for i, (term, expression) in enumerate(zip(terms, found, strict=True)):
            free = [part for part in derivatives(expression) if part.by.count(name) > count and not term.fixed]
            if free:
                first, order = free[0], free[0].by.count(name)
                if count:
                    others = f"at another value of {name}, or one with {first.output}_{name * (order - 1)}"
                    expected = f"{order} conditions at values of {name}, not {count}: add a term {others}"
                else:
                    low = cfg.data.points[name][0] if cfg.data.points else 0.0
                    term_of_one = f"{{at: {{{name}: {low:g}}}, equation: ...}}"
                    expected = f"a condition at a value of {name}, too: add a term such as {term_of_one}"
                error = EquationError(f"found {first.name}, expected {expected}", term.equation, first.at)
                problems.append(_problem(cfg, ("loss", i, "equation"), error))
                break
    return problems
