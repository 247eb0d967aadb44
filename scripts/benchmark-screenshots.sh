#!/bin/bash
# benchmark-screenshots.sh REPORT DIRECTORY: pictures of a report as a screen, a phone and paper show it, made
# by a headless Chromium without a network.
set -euo pipefail

report=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
command -v chromium >/dev/null || { echo "no screenshots: chromium is not installed" >&2; exit 0; }
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT

# look WIDTHxHEIGHT ARGUMENT...: in a network namespace of its own, in which nothing answers.
look() {
	local size=$1
	shift
	timeout 120 unshare --net chromium --headless --no-sandbox --disable-gpu --hide-scrollbars \
		--user-data-dir="$profile" --window-size="${size/x/,}" "$@" "file://$report" 2>/dev/null >/dev/null
}

look 1100x1400 --screenshot="$out/report-screen.png"
look 390x1200 --screenshot="$out/report-phone.png"
look 1100x1400 --no-pdf-header-footer --print-to-pdf="$out/report-print.pdf"
# Its first page.
if command -v pdftoppm >/dev/null; then
	pdftoppm -png -singlefile -r 80 "$out/report-print.pdf" "$out/report-print"
fi
echo "$out/report-screen.png"
