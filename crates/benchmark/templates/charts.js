// Hands the charts of the page to ECharts. Each lies in a figure: the place where it is drawn, what it is drawn from as
// JSON, and a table of the same numbers, which is folded away when there is a chart.
"use strict";
(() => {
	// Text has the colour of the page, which differs by day and night.
	const TEXT = "currentColor", DIM = "#777777", GRID = "#88888844";
	const LOGARITHMIC = "path://M2 14V2M2 14H14M3 13Q4 5 14 3";
	const NARROW = 520, BAND = 38, ROW = 18;
	const plots = [...document.querySelectorAll("figure .plot")];
	const drawn = new Map();

	// As the tables have it: four digits that count.
	function number(value) {
		const size = Math.abs(value);
		if (size >= 1000 || value === 0) return value.toFixed(0);
		if (size >= 100) return value.toFixed(1);
		if (size >= 10) return value.toFixed(2);
		return size >= 0.001 ? value.toFixed(3) : value.toExponential(2);
	}

	// An element and not HTML: names of targets are not ours.
	function lines(...texts) {
		const box = document.createElement("div");
		for (const text of texts.filter(text => text)) box.appendChild(document.createElement("div")).textContent = text;
		return box;
	}

	function toolbox(plot, positive, zoom) {
		const feature = {
			dataZoom: { ...zoom, filterMode: "none", title: { zoom: "zoom: mark a range", back: "zoom out" } },
		};
		if (positive) {
			feature.myLogarithmic = {
				title: "logarithmic scale, or linear", icon: LOGARITHMIC,
				onclick: () => {
					plot.isLogarithmic = !plot.isLogarithmic;
					show(plot);
				},
			};
		}
		return { right: 8, top: 0, itemSize: 13, iconStyle: { borderColor: DIM }, feature };
	}

	function shared(plot, positive, zoom) {
		return {
			animation: false,
			textStyle: { color: TEXT, fontFamily: "system-ui, sans-serif", fontSize: 11 },
			toolbox: toolbox(plot, positive, zoom),
		};
	}

	function scale(plot, extra) {
		return {
			type: plot.isLogarithmic ? "log" : "value",
			axisLabel: { color: DIM, fontSize: 11, hideOverlap: true },
			nameTextStyle: { color: DIM, fontSize: 11 },
			splitLine: { lineStyle: { color: GRID } },
			...extra,
		};
	}

	// A band for each target: a box from quartile to quartile, every sample above it, and the interval of the median below.
	function spread(plot, { unit, bands }) {
		const all = bands.flatMap(band => band.values), low = Math.min(...all), high = Math.max(...all);
		const left = plot.clientWidth < NARROW ? 105 : 160;
		const boxes = bands.map(({ box: quantiles, colour }) => ({
			value: quantiles, itemStyle: { color: colour + "40", borderColor: colour },
		}));
		const dots = bands.flatMap(({ values, colour, far = [] }, place) => values.map((value, order) => ({
			value: [value, place, order],
			// In three rows by turns, so that equal values do not hide each other.
			symbolOffset: [0, [-5, 0, 5][order % 3]],
			...far.includes(order)
				? { symbolSize: 9, itemStyle: { color: "transparent", borderColor: colour, borderWidth: 1.5 } }
				: { itemStyle: { color: colour } },
		})));
		const intervals = bands.flatMap(({ interval }, place) => interval ? [[...interval, place]] : []);
		return {
			...shared(plot, low > 0, { yAxisIndex: "none" }),
			grid: { left, right: 24, top: 24, bottom: 40 },
			// From zero where that costs little room, so that lengths can be compared.
			xAxis: scale(plot, { scale: low > 0.5 * high, name: unit, nameLocation: "middle", nameGap: 24 }),
			yAxis: {
				type: "category", inverse: true, data: bands.map(band => band.name),
				axisTick: { show: false }, axisLine: { show: false },
				axisLabel: { color: TEXT, interval: 0, width: left - 12, overflow: "break", lineHeight: 13 },
			},
			tooltip: {
				confine: true,
				formatter: ({ seriesType, dataIndex, value }) => {
					if (seriesType === "scatter")
						return lines(bands[value[1]].name, `sample ${value[2] + 1}: ${number(value[0])} ${unit}`);
					const { name, box: quantiles, interval } = bands[seriesType === "custom" ? value[2] : dataIndex];
					const [p5, p25, median, p75, p95] = quantiles.map(number);
					return lines(
						name, `median: ${median} ${unit}`,
						interval && `its interval at 95 %: ${number(interval[0])} to ${number(interval[1])}`,
						`quartiles: ${p25} and ${p75}`, `5 % and 95 %: ${p5} and ${p95}`,
					);
				},
			},
			series: [
				{ type: "boxplot", data: boxes, boxWidth: [18, 18] },
				{ type: "scatter", data: dots, symbolSize: 5, itemStyle: { opacity: 0.75 } },
				{
					type: "custom", data: intervals, clip: true, encode: { x: [0, 1], y: 2 },
					renderItem: (_, api) => {
						const place = api.value(2);
						const [[from, y], [to]] = [0, 1].map(side => api.coord([api.value(side), place]));
						const shape = { x1: from, x2: to, y1: y + 14, y2: y + 14 };
						return { type: "line", shape, style: { stroke: bands[place].colour, lineWidth: 3 } };
					},
				},
			],
		};
	}

	// A line for each target.
	function scaling(plot, { unit, over, lines: all }) {
		const values = all.flatMap(line => line.points.map(point => point[1]));
		return {
			...shared(plot, values.every(value => value > 0), {}),
			grid: { left: 56, right: 24, top: 30, bottom: 46 + ROW * all.length },
			legend: {
				orient: "vertical", left: 56, bottom: 0, padding: 0, itemGap: ROW - 14, itemHeight: 14, itemWidth: 36,
				textStyle: { color: TEXT },
			},
			xAxis: scale(plot, { name: over, nameLocation: "middle", nameGap: 24 }),
			yAxis: scale(plot, { name: unit, nameTextStyle: { color: DIM, fontSize: 11, align: "left" } }),
			tooltip: {
				trigger: "axis", confine: true,
				formatter: points => lines(
					`${points[0].value[0]} containers`,
					...points.map(({ seriesName, value }) => `${seriesName}: ${number(value[1])} ${unit}`),
				),
			},
			series: all.map(({ name, colour, pattern, points }) => ({
				type: "line", name, data: points, symbol: "circle", symbolSize: 7,
				itemStyle: { color: colour }, lineStyle: { color: colour, width: 2, type: pattern },
			})),
		};
	}

	const KINDS = {
		spread: { option: spread, height: data => 24 + BAND * data.bands.length + 40 },
		scale: { option: scaling, height: data => 280 + ROW * data.lines.length },
	};

	function show(plot) {
		const { chart, data } = drawn.get(plot);
		chart.setOption(KINDS[data.kind].option(plot, data), { notMerge: true });
		// On paper it is made smaller.
		const svg = plot.querySelector("svg");
		svg.setAttribute("viewBox", `0 0 ${chart.getWidth()} ${chart.getHeight()}`);
	}

	function draw(plot) {
		if (drawn.has(plot)) return;
		const figure = plot.closest("figure");
		const data = JSON.parse(figure.querySelector("script").textContent);
		plot.style.height = `${KINDS[data.kind].height(data)}px`;
		drawn.set(plot, { chart: echarts.init(plot, null, { renderer: "svg" }), data });
		show(plot);
		figure.querySelector("details").open = false;
	}

	// One after the other, so that the page can be read meanwhile.
	function next(place) {
		if (place === plots.length) {
			document.documentElement.dataset.charts = "drawn";
			return;
		}
		draw(plots[place]);
		setTimeout(next, 0, place + 1);
	}

	let resized;
	addEventListener("resize", () => {
		clearTimeout(resized);
		resized = setTimeout(() => {
			if (matchMedia("print").matches) return;
			for (const [plot, { chart }] of drawn) {
				if (chart.getWidth() === plot.clientWidth) continue;
				chart.resize();
				show(plot);
			}
		}, 100);
	});

	addEventListener("beforeprint", () => {
		plots.forEach(draw);
		for (const { chart } of drawn.values()) chart.setOption({ toolbox: { show: false } });
	});
	addEventListener("afterprint", () => {
		for (const { chart } of drawn.values()) chart.setOption({ toolbox: { show: true } });
	});

	next(0);
})();
