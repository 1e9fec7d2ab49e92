# Sourced by the entry scripts. install_missing <package>… has apt install those that are not there, and says nothing
# where none is missing. Where there is no apt it names what the user has to bring.

has_apt() { command -v dpkg-query >/dev/null && command -v apt-get >/dev/null; }

# Puts what runs a command as root into the array as_root.
become_root() {
    as_root=()
    [ "$(id -u)" -eq 0 ] && return 0
    command -v sudo >/dev/null || return 1
    as_root=(sudo)
}

# A source of packages that cannot be reached may not matter: whether the packages can be had decides.
update_package_lists() { "${as_root[@]}" apt-get -qq -o Acquire::Retries=3 update || true; }

install_missing() {
    local package log attempt wanted=() as_root
    if ! has_apt; then
        echo "No apt here. The packages that Debian calls $* must be installed already."
        return 0
    fi
    for package in "$@"; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q '^install ok installed$' || wanted+=("$package")
    done
    [ ${#wanted[@]} -gt 0 ] || return 0

    become_root || { echo "To install ${wanted[*]} this script needs root or sudo." >&2; return 1; }
    echo "Installing ${wanted[*]}"
    log=$(mktemp)
    for attempt in 1 2 3; do
        update_package_lists >"$log" 2>&1
        if "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
                apt-get -qq -y -o Acquire::Retries=3 --no-install-recommends install "${wanted[@]}" >>"$log" 2>&1; then
            rm -f "$log"
            return 0
        fi
        echo "apt-get failed, attempt $attempt of 3"
        sleep $((attempt * 5))
    done
    tail -n 30 "$log" >&2
    rm -f "$log"
    return 1
}

# For a package that is only downloaded: apt must have read the lists that name it.
know_package() {
    local as_root
    if has_apt && [ -z "$(apt-cache show "$1" 2>/dev/null)" ] && become_root; then
        update_package_lists >/dev/null 2>&1
    fi
}
