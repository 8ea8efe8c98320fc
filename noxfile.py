"""The one place that knows how to run anything. `nox -l` lists what there is; `CONTRIBUTING.md` says when to use what.

Everything runs against built wheels, never against the source tree. Three kinds of environment, under `.nox/`:

- `unit(PACKAGE)` and `floor(PACKAGE)` have one each: the package's wheel, what it declares, and no other part of us;
- `composed` holds all packages together and serves the suites of `tests/`, the documentation, recipes and benchmarks;
- `newest` holds all packages together with the newest torch of the declared range.

An environment is kept between runs. It is made anew when `constraints.txt` or a `pyproject.toml` behind it changes; of
our own wheels only those whose content changed are installed again (hatchling builds are reproducible, so equal sources
give equal wheels).
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

from projects import TESTING, Project, dependencies, lowest_version, read_project, read_projects, requirement_name

PACKAGES = read_projects()
PROJECTS = {**PACKAGES, TESTING: read_project(ROOT / "testing")}
# tests/repo needs no environment of the packages: it belongs to lint
SUITES = sorted({path.parent.name for path in ROOT.glob("tests/*/test_*.py")} - {"repo"})
CONSTRAINTS = ROOT / "constraints.txt"
DIST = ROOT / "dist"
BUILT: set[Path] = set()  # wheels of this run of nox
RECIPE_REQUIREMENTS = ("matplotlib", "tqdm", "transformers", "zlib-ng")

# One thread per process: the ranks of a test share the machine. No PYTHONPATH: only the environment's packages count.
# Nothing is fetched from a hub at run time. Bytecode is kept, as `PIP` compiles none.
RUN_ENV = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": None,
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONDONTWRITEBYTECODE": None,
}

# Most of torch's modules are imported by no test. Those that are, python compiles at their first import, and keeps.
PIP = ("python", "-m", "pip", "install", "--quiet", "--no-compile")  # not session.install, which `nox -R` leaves out

# A test of ranks takes up to half a minute on a quiet machine, and a time-out says that something hangs, not that the
# machine is busy.
PATIENT = ("--ranks-timeout", "180")

# As many tests of a package at a time as there are cores: the ranks of one test wait for each other and leave some of
# them idle. `-- -n 0` runs them one by one, as a debugger needs it.
AT_A_TIME = ("-n", "auto", "--maxprocesses", "4", "--dist", "worksteal", *PATIENT)
# These suites start programs, which limit their own times.
ONE_BY_ONE = {"docs", "recipes"}

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "unit", "integration"]

each_package = nox.parametrize("package", list(PACKAGES), ids=list(PACKAGES))
each_project = nox.parametrize("package", list(PROJECTS), ids=list(PROJECTS))
each_suite = nox.parametrize("suite", SUITES, ids=SUITES)


# ---------------------------------------------------------------------------------------------------- environments


def digest(*files: Path) -> str:
    """Return a short hash of the contents of some files."""
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def builder(session: nox.Session) -> Path:
    """Return the python of a small environment that has hatchling and nothing else; make it where it is missing."""
    home = session.cache_dir.resolve() / f"build-{digest(CONSTRAINTS)}"
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        subprocess.run([sys.executable, "-m", "virtualenv", "--quiet", str(home)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, "hatchling"], check=True)
        (home / "complete").touch()
    return python


def build_wheel(session: nox.Session, name: str) -> Path:
    """Build a distribution's wheel into ``dist/``, once per run of nox, and return it."""
    project = PROJECTS[name]
    wheel = DIST / project.wheel_name
    if wheel not in BUILT:
        command = [builder(session), "-m", "hatchling", "build", "-t", "wheel", "-d", DIST]
        done = subprocess.run(command, cwd=project.folder, text=True, capture_output=True, check=False)
        if done.returncode:
            session.error(f"{name} does not build:\n{done.stdout}{done.stderr}")
        BUILT.add(wheel)
    return wheel


def start_environment(session: nox.Session, names: list[str], *more: str) -> None:
    """Empty the session's environment if it was made for other constraints, declarations or ``more`` arguments."""
    files = [CONSTRAINTS, *(PROJECTS[name].folder / "pyproject.toml" for name in names)]
    key = "|".join([digest(*files), *names, *more])
    stamp = session.env_dir / "vescale-installed.json"
    if stamp.exists() and json.loads(stamp.read_text())["key"] == key:
        return
    if stamp.exists():
        session.log("constraints or declared dependencies have changed: making the environment anew")
        shutil.rmtree(session.env_dir)
        session.virtualenv.create()
    stamp.write_text(json.dumps({"key": key, "installed": {}}))


def install(session: nox.Session, names: list[str], *requirements: str, constraints: Path = CONSTRAINTS) -> None:
    """Install our wheels ``names`` (by path, so that no index is asked for them) with what they declare.

    What the environment already holds is left alone. A wheel of which only the content changed is replaced alone.
    """
    stamp = session.env_dir / "vescale-installed.json"
    record = json.loads(stamp.read_text())
    installed = record["installed"]
    wheels = {name: build_wheel(session, name) for name in names}
    wanted = {str(wheel): digest(wheel) for wheel in wheels.values()} | dict.fromkeys(requirements, "")
    new = [item for item in wanted if item not in installed]
    changed = [item for item in wanted if item in installed and installed[item] != wanted[item]]
    if new:
        session.run(*PIP, "--constraint", str(constraints), *new)
    if changed:
        session.run(*PIP, "--no-deps", "--force-reinstall", *changed)
    record["installed"] = installed | wanted
    stamp.write_text(json.dumps(record, indent=1))


def family(package: str) -> list[str]:
    """Return a package and the siblings that it declares, directly or not."""
    return sorted({package} | dependencies(PROJECTS, package))


def all_test_requirements() -> list[str]:
    """Return what the tests of all packages need beyond the packages."""
    return sorted({requirement for project in PACKAGES.values() for requirement in project.test_requirements})


def run_unit_tests(session: nox.Session, package: str, *, constraints: Path = CONSTRAINTS) -> None:
    """Check the environment, run the README's example as a new user would, then the package's tests."""
    folder = PROJECTS[package].folder
    check = ("python", "tools/check_environment.py", *(name for name in family(package) if name != TESTING))
    session.run(*check, env=RUN_ENV)
    session.run("python", "tools/run_examples.py", relative(folder / "README.md"), env=RUN_ENV)
    install(session, [TESTING], *PROJECTS[package].test_requirements, constraints=constraints)
    session.run(*check, env=RUN_ENV)
    session.run("pytest", *AT_A_TIME, relative(folder / "tests"), *session.posargs, env=RUN_ENV)


def relative(path: Path) -> str:
    """Return a path as seen from the root, where every command runs. From there no part of `vescale` is importable."""
    return str(path.relative_to(ROOT))


def run_composed(session: nox.Session, program: str, *arguments: str) -> None:
    """Run a program of the composed environment."""
    programs = session.cache_dir.resolve().parent / "composed" / "bin"
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    session.run(str(programs / program), *arguments, env={**RUN_ENV, "PATH": path}, external=True)


# -------------------------------------------------------------------------------------------------------- sessions


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting, types and the rules of the repository."""
    # a type checker reads what is imported: what the packages declare, and what their extras add
    requirements = {r for each in PROJECTS.values() for r in each.requirements}
    requirements |= {r for each in PACKAGES.values() for r in each.optional_requirements}
    session.run(*PIP, "--constraint", str(CONSTRAINTS), "ruff", "mypy", "pytest", *sorted(requirements))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("pytest", "tests/repo")


@nox.session(default=False, venv_backend="none")
@each_package
def build(session: nox.Session, package: str) -> None:
    """Build one package's wheel into dist/."""
    session.log(f"built {build_wheel(session, package).relative_to(ROOT)}")


@nox.session
@each_project
def unit(session: nox.Session, package: str) -> None:
    """Test one package's wheel with only what it declares."""
    start_environment(session, [*family(package), TESTING])
    install(session, family(package))
    run_unit_tests(session, package)


@nox.session(default=False)
@each_project
def thorough(session: nox.Session, package: str) -> None:
    """Run the tests of one package that take long: the whole products of which the unit session runs a part."""
    start_environment(session, [*family(package), TESTING])
    install(session, family(package))
    install(session, [TESTING], *PROJECTS[package].test_requirements)
    folder = relative(PROJECTS[package].folder / "tests")
    session.run("pytest", folder, "-m", "thorough", *session.posargs, env=RUN_ENV, success_codes=[0, 5])


@nox.session(default=False)
@each_package
def floor(session: nox.Session, package: str) -> None:
    """Test one package with the lowest versions that it declares."""
    pins = floor_pins(session, PROJECTS[package])
    start_environment(session, [*family(package), TESTING], *pins)
    constraints = constraints_without(session, {requirement_name(pin) for pin in pins}, *pins)
    install(session, family(package), *pins, constraints=constraints)
    run_unit_tests(session, package, constraints=constraints)


@nox.session(default=False)
def newest(session: nox.Session) -> None:
    """Run the unit tests of all packages with the newest torch that they declare; all else as in constraints.txt."""
    names = [*PACKAGES, TESTING]
    constraints = constraints_without(session, {"torch"})
    start_environment(session, names, "newest torch")
    (torch,) = {r for project in PROJECTS.values() for r in project.requirements if requirement_name(r) == "torch"}
    # asked each time, since a newer one may be there; on Linux the CUDA build, gigabytes of it, if pip finds no other
    session.run(*PIP, "--upgrade", "--constraint", str(constraints), torch)
    install(session, names, *all_test_requirements(), constraints=constraints)
    session.run("python", "tools/check_environment.py", *PACKAGES, env=RUN_ENV)
    session.run("python", "-c", "import torch; print('torch', torch.__version__)", env=RUN_ENV)
    folders = [relative(project.folder / "tests") for project in PROJECTS.values()]
    session.run("pytest", *AT_A_TIME, *folders, *session.posargs, env=RUN_ENV)


@nox.session(default=False)
def composed(session: nox.Session) -> None:
    """Install all packages together (what the sessions below run in)."""
    names = [*PACKAGES, TESTING]
    start_environment(session, names)
    install(session, names, *all_test_requirements(), *RECIPE_REQUIREMENTS, "pdoc")
    session.run("python", "tools/check_environment.py", *PACKAGES, env=RUN_ENV)


@nox.session(venv_backend="none", requires=["composed"])
@each_suite
def integration(session: nox.Session, suite: str) -> None:
    """Run one composed suite of tests/ over all built wheels."""
    how = PATIENT if suite in ONE_BY_ONE else AT_A_TIME
    run_composed(session, "pytest", *how, f"tests/{suite}", *session.posargs)


@nox.session(default=False, venv_backend="none", requires=["composed"])
def docs(session: nox.Session) -> None:
    """Execute every code block of the documentation, those of the packages' own pages included."""
    run_composed(session, "pytest", "tests/docs", "-m", "", *session.posargs)


@nox.session(default=False, venv_backend="none", requires=["composed"])
def api(session: nox.Session) -> None:
    """Build the reference of every public name from its docstring into runs/api/."""
    run_composed(session, "python", "tools/api_site.py", "runs/api")


@nox.session(default=False, venv_backend="none", requires=["composed"])
def mixtral_4d(session: nox.Session) -> None:
    """Train an unmodified Mixtral in 4D and compare with one process (arguments after -- go to train.py)."""
    with_dropout = ["--dp", "2", "--tp", "2", "--pp", "2", "--dropout", "0.1", "--steps", "8", "--out", "runs/dropout"]
    for arguments in [session.posargs] if session.posargs else [with_dropout, []]:
        run_composed(session, "python", "recipes/mixtral_4d/train.py", *arguments)


@nox.session(default=False, venv_backend="none", requires=["composed"])
def nanogpt_dropout(session: nox.Session) -> None:
    """Train a nanoGPT with dropout on sharded tensors, with our randomness and with stock torch's."""
    run_composed(session, "python", "recipes/nanogpt_dropout/train.py", *session.posargs)


@nox.session(default=False, venv_backend="none", requires=["composed"])
def exact_layouts(session: nox.Session) -> None:
    """Train a small LLaMA in exact mode under several plans, and compare with one process, bit for bit."""
    run_composed(session, "python", "recipes/exact_layouts/train.py", *session.posargs)


@nox.session(default=False, venv_backend="none", requires=["composed"])
def coverage(session: nox.Session) -> None:
    """Compare every operator of torch's database on DTensors with one device: stock torch's, then ours (long)."""
    program = "packages/vescale-dtensor/coverage/run.py"
    for arguments in (["--stock"], []):
        run_composed(session, "python", program, *arguments, "--out", "runs/coverage", *session.posargs)


@nox.session(default=False, venv_backend="none", requires=["composed"])
def hunt(session: nox.Session) -> None:
    """Compare random programs on DTensors with one device, and shrink what differs: `-- --minutes 60 --seed 1`."""
    run_composed(session, "python", "packages/vescale-dtensor/coverage/hunt.py", *session.posargs)


@nox.session(default=False, venv_backend="none", requires=["composed"])
def families(session: nox.Session) -> None:
    """Train tiny models of many Hugging Face families on ranks and compare with one process: `-- --families bert`."""
    run_composed(session, "python", "tests/families/zoo.py", *session.posargs)


@nox.session(default=False, venv_backend="none", requires=["composed"])
def small_models(session: nox.Session) -> None:
    """Train small models that do one thing with their rows, on ranks, against one process: `-- --models drop`."""
    run_composed(session, "python", "tests/small_models/sweep.py", *session.posargs)


@nox.session(default=False, venv_backend="none", requires=["composed"])
def bench(session: nox.Session) -> None:
    """Run the benchmarks (name some after --)."""
    run_composed(session, "python", "benchmarks/run.py", *session.posargs)


@nox.session(default=False, venv_params=["--system-site-packages"])
def gpu(session: nox.Session) -> None:
    """Run the tests that need a CUDA device, with the machine's own torch where it has one."""
    found = shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi", "-L"], check=False).returncode == 0
    if not found:
        session.skip("no CUDA device on this machine (nvidia-smi finds none)")
    names = [*PACKAGES, TESTING]
    has_torch = session.run("python", "-c", "import torch; print(torch.__version__)", silent=True, success_codes=[0, 1])
    start_environment(session, names, str(has_torch))
    # A machine's torch fits its driver: keep it, whatever the constraints say, and add only what is missing.
    torch_is_there = "Error" not in str(has_torch)
    empty = Path(session.create_tmp(), "constraints.txt").resolve()
    empty.write_text("")
    install(session, names, *all_test_requirements(), constraints=empty if torch_is_there else CONSTRAINTS)
    session.run("pytest", "packages", "-m", "gpu", *session.posargs, env=RUN_ENV)


@nox.session(default=False, venv_backend="none")
def dev(session: nox.Session) -> None:
    """Make .venv with all packages editable, the test plugin and every tool."""
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists():
        session.run(sys.executable, "-m", "virtualenv", str(ROOT / ".venv"), external=True)
    install_command = [str(python), "-m", "pip", "install", "--constraint", str(CONSTRAINTS)]
    session.run(
        *install_command,
        "hatchling",
        "editables",
        "nox",
        "ruff",
        "mypy",
        "pre-commit",
        *RECIPE_REQUIREMENTS,
        external=True,
    )
    editable = [argument for project in PROJECTS.values() for argument in ("--editable", f"{project.folder}[test]")]
    session.run(*install_command, "--no-build-isolation", *editable, external=True)
    session.log("ready: source .venv/bin/activate")


# --------------------------------------------------------------------------------------------------------- helpers


def constraints_without(session: nox.Session, names: set[str], *pins: str) -> Path:
    """Write ``constraints.txt`` with other ``pins``, or none, in place of those of ``names``; return the file."""
    kept = [line for line in CONSTRAINTS.read_text().splitlines() if line.split("==")[0] not in names]
    constraints = Path(session.create_tmp(), "constraints.txt").resolve()
    constraints.write_text("\n".join([*kept, *pins]) + "\n")
    return constraints


def floor_pins(session: nox.Session, project: Project) -> list[str]:
    """Return pins to the lowest version of each third-party dependency of a package that can be installed here."""
    pins = []
    for requirement in project.requirements:
        name, version = requirement_name(requirement), lowest_version(requirement)
        # On Linux a plain torch wheel is the CUDA build, gigabytes of it: only the CPU build will do.
        pin = f"{name}=={version}{'.0+cpu' if name == 'torch' and sys.platform == 'linux' else ''}"
        if name != "torch" or can_install(session, pin):
            pins.append(pin)
        else:
            session.warn(f"{pin} cannot be had from the configured indexes: testing with the torch of constraints.txt")
    return pins


def can_install(session: nox.Session, pin: str) -> bool:
    """Whether pip finds a wheel for ``pin``."""
    command = [
        str(Path(session.bin, "python")),
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--no-deps",
        "--ignore-installed",
        pin,
    ]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
