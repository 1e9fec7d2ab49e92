# Sourced by the entry scripts. install_missing <package>… has apt install those that are not there, and says nothing
# where none is missing. Where there is no apt it names what the user has to bring.

install_missing() {
    local package wanted=() as_root=()
    if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
        echo "No apt here. The packages that Debian calls $* must be installed already."
        return 0
    fi
    for package in "$@"; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q '^install ok installed$' || wanted+=("$package")
    done
    [ ${#wanted[@]} -gt 0 ] || return 0

    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || { echo "To install ${wanted[*]} this script needs root or sudo." >&2; return 1; }
        as_root=(sudo)
    fi
    echo "Installing ${wanted[*]}"
    local log attempt
    log=$(mktemp)
    for attempt in 1 2 3; do
        # A source of packages that cannot be reached may not matter: whether the packages can be had decides.
        if "${as_root[@]}" apt-get -qq -o Acquire::Retries=3 update >"$log" 2>&1; \
           "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
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
