#!/bin/bash
# benchmark-screenshots.sh REPORT DIRECTORY: pictures of a report as a screen, a phone and paper show it, its head and its
# first charts, made by a headless Chromium without a network.
set -euo pipefail

report=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
command -v chromium >/dev/null || { echo "no screenshots: chromium is not installed" >&2; exit 0; }
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT

# A page with the report in a frame of this width, scrolled to an element when the charts are drawn.
framed() { # WIDTH ELEMENT
	cat >"$profile/$1-$2.html" <<END
<!doctype html><body style="margin:0"><iframe src="file://$report" style="border:0;width:$1px;height:100vh;display:block"></iframe><script>
onload = () => {
	const page = document.querySelector("iframe").contentDocument;
	if (page.documentElement.dataset.charts !== "drawn") return setTimeout(onload, 50);
	page.querySelector("$2").scrollIntoView();
};
</script>
END
	echo "$profile/$1-$2.html"
}

# look WIDTHxHEIGHT PAGE ARGUMENT...: in a network namespace of its own, in which nothing answers.
look() {
	local size=$1 page=$2
	shift 2
	timeout 120 unshare --net chromium --headless --no-sandbox --disable-gpu --hide-scrollbars \
		--allow-file-access-from-files --user-data-dir="$profile" --window-size="${size/x/,}" \
		--virtual-time-budget=60000 "$@" "file://$page" 2>/dev/null >/dev/null
}

look 1100x1400 "$report" --screenshot="$out/report-screen.png"
look 1100x1000 "$(framed 1100 h3)" --screenshot="$out/report-charts.png"
look 390x1200 "$(framed 390 body)" --screenshot="$out/report-phone.png"
look 390x1200 "$(framed 390 h3)" --screenshot="$out/report-phone-charts.png"
look 1100x1400 "$report" --no-pdf-header-footer --print-to-pdf="$out/report-print.pdf"
# Its first page, and that with the first charts.
if command -v pdftoppm >/dev/null; then
	charts=$(pdftotext "$out/report-print.pdf" - | awk 'BEGIN { RS = "\f" } /Each benchmark/ { page = NR } END { print page }')
	pdftoppm -png -singlefile -r 80 "$out/report-print.pdf" "$out/report-print"
	pdftoppm -png -singlefile -r 80 -f "$((charts + 1))" "$out/report-print.pdf" "$out/report-print-charts"
fi
echo "$out/report-screen.png"
