#!/bin/bash
# install.sh: puts torpor, the links criu and crit, manual pages, completions and systemd units below
# $DESTDIR$PREFIX. Asks before it shadows another criu; SHADOW=yes or SHADOW=no answers beforehand.
# BUILT names the program to install if it is not the one that `make build` made.
set -euo pipefail
cd "$(dirname "$0")/.."

prefix=${PREFIX:-/usr/local}
root=${DESTDIR:-}$prefix
built=${BUILT:-target/release/torpor}

# Another criu or crit on this machine that the links would hide or replace.
others() {
    local name path
    for name in criu crit; do
        for path in "$root/bin/$name" $(type -ap "$name"); do
            [ -e "$path" ] || [ -L "$path" ] || continue
            case $(readlink "$path" || true) in torpor | */torpor) continue ;; esac
            echo "$(realpath "$(dirname "$path")")/$name"
        done
    done | sort -u
}

may_shadow() {
    local found
    # Below a DESTDIR nothing is on anybody's PATH.
    [ -z "${DESTDIR:-}" ] || return 0
    found=$(others)
    [ -n "$found" ] || return 0
    case ${SHADOW:-} in yes) return 0 ;; no) return 1 ;; esac
    echo "There already is:" >&2
    sed 's/^/    /' <<<"$found" >&2
    if [ ! -t 0 ]; then
        echo "Nobody to ask: the links criu and crit are left out. SHADOW=yes puts them in place." >&2
        return 1
    fi
    read -rp "Put $prefix/bin/criu and $prefix/bin/crit in front of it? [y/N] " answer
    [[ $answer == [yY]* ]]
}

# Debug information stays in the build directory.
install -D -s -m 755 "$built" "$root/bin/torpor"
if may_shadow; then
    ln -sfn torpor "$root/bin/criu"
    ln -sfn torpor "$root/bin/crit"
fi

pages=$(mktemp -d)
trap 'rm -rf "$pages"' EXIT
"$built" man "$pages"
for page in "$pages"/*; do
    install -D -m 644 "$page" "$root/share/man/man${page##*.}/${page##*/}"
done
[ -L "$root/bin/criu" ] || rm -f "$root"/share/man/man8/criu.8

complete() { # SHELL PATH
    mkdir -p "$(dirname "$root/share/$2")"
    "$built" completion "$1" >"$root/share/$2"
}
complete bash bash-completion/completions/torpor
complete zsh zsh/site-functions/_torpor
complete fish fish/vendor_completions.d/torpor.fish

# None is enabled: the agent needs certificates first.
for unit in scripts/systemd/*.service; do
    install -D -m 644 "$unit" "$root/lib/systemd/system/${unit##*/}"
done
sed -i "s#/usr/local/bin/torpor#$prefix/bin/torpor#" "$root"/lib/systemd/system/torpor-*.service
echo "installed below $root"
