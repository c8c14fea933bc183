// A small curve on a canvas: a line, what is below it, and a dot at the moment that is shown.

const PIXELS_OF_A_POINT = 1.5;

export class Curve {
  constructor(canvas, variable) {
    this.canvas = canvas;
    this.variable = variable; // CSS variable of its colour
  }

  // Draw points [time, value]; `moment` is the time that is shown.
  draw(points, moment) {
    const { canvas } = this;
    const scale = window.devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
    if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    points = thinned(points, width / PIXELS_OF_A_POINT);
    if (points.length < 2) return;
    const colour = getComputedStyle(canvas).getPropertyValue(this.variable).trim();
    const place = places(points, width, height);
    pen.lineJoin = "round";
    pen.lineWidth = 1.5;
    pen.strokeStyle = pen.fillStyle = colour;
    pen.beginPath();
    points.forEach(([time, value], index) => {
      const [x, y] = place(time, value);
      if (index) pen.lineTo(x, y);
      else pen.moveTo(x, y);
    });
    pen.stroke();
    pen.lineTo(place(points.at(-1)[0], 0)[0], height);
    pen.lineTo(place(points[0][0], 0)[0], height);
    pen.globalAlpha = 0.1;
    pen.fill();
    pen.globalAlpha = 1;
    const now = points.findLast(([time]) => time <= moment) ?? points[0];
    pen.beginPath();
    pen.arc(...place(now[0], now[1]), 2.6, 0, 2 * Math.PI);
    pen.fill();
  }
}

// At most about `most` points, means of neighbours: more would only be noise.
function thinned(points, most) {
  const size = Math.ceil(points.length / Math.max(2, most));
  if (size <= 1) return points;
  const found = [];
  for (let begin = 0; begin < points.length; begin += size) {
    const some = points.slice(begin, begin + size);
    found.push([0, 1].map((part) => some.reduce((sum, point) => sum + point[part], 0) / some.length));
  }
  return found;
}

// The function from a time and a value to a place on the canvas. Values that hardly differ make a flat line.
function places(points, width, height) {
  let [low, high] = [Infinity, -Infinity];
  for (const [, value] of points) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  const least = 0.02 * Math.max(Math.abs(low), Math.abs(high), 1e-9);
  if (high - low < least) [low, high] = [low - least / 2, high + least / 2];
  const [begin, end] = [points[0][0], points.at(-1)[0]];
  const seconds = Math.max(end - begin, 1e-9);
  return (time, value) => [
    3 + ((width - 6) * (time - begin)) / seconds,
    height - 4 - ((height - 8) * (value - low)) / (high - low),
  ];
}
