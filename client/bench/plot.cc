// The SVG plot of a bench, written by hand: axes, grid, three lines.
#include <algorithm>
#include <cmath>
#include <functional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "client/bench/report.h"

namespace awqd::bench {
namespace {

constexpr double kWidth = 760, kHeight = 460;
constexpr double kLeft = 80, kRight = 24, kTop = 56, kBottom = 56;

struct Line {
  const char* name;
  const char* color;
  double share;
};
constexpr Line kLines[] = {
    {"p50", "#1f77b4", 0.5}, {"p99", "#ff7f0e", 0.99}, {"p99.9", "#d62728", 0.999}};

std::string Escaped(const std::string& text) {
  return absl::StrReplaceAll(text,
                             {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}});
}

// 1, 2 or 5 times a power of ten, at least `value`.
double NiceStep(double value) {
  const double power = std::pow(10, std::floor(std::log10(value)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= value * (1 - 1e-9)) return factor * power;
  }
  return 10 * power;
}

std::string Duration(double us) {
  if (us < 1000) return absl::StrFormat("%g us", us);
  if (us < 1e6) return absl::StrFormat("%g ms", us / 1000);
  return absl::StrFormat("%g s", us / 1e6);
}

// Where throughput and latency lie on the page.
class Page {
 public:
  explicit Page(const std::vector<PointResult>& results) {
    double top_rate = 1, low_us = 1e12, high_us = 1;
    for (const PointResult& result : results) {
      top_rate = std::max(top_rate, RatesOf(result.load).requests);
      for (const Line& line : kLines) {
        const double us = Us(result, line);
        if (us <= 0) continue;
        low_us = std::min(low_us, us);
        high_us = std::max(high_us, us);
      }
    }
    step_ = NiceStep(top_rate / 6);
    top_rate_ = std::ceil(top_rate / step_ * (1 + 1e-9)) * step_;
    low_ = std::floor(std::log10(std::min(low_us, high_us)));
    high_ = std::max(low_ + 1, std::ceil(std::log10(high_us)));
  }

  static double Us(const PointResult& result, const Line& line) {
    return static_cast<double>(result.load.tally.latency.QuantileNs(line.share)) / 1000;
  }
  double X(double rate) const { return kLeft + rate / top_rate_ * (kWidth - kLeft - kRight); }
  double Y(double us) const {
    const double part = (std::log10(us) - low_) / (high_ - low_);
    return kHeight - kBottom - part * (kHeight - kTop - kBottom);
  }

  std::string Axes() const {
    std::string svg;
    for (double rate = 0; rate <= top_rate_ * (1 + 1e-9); rate += step_) {
      absl::StrAppendFormat(&svg,
                            "<line class=\"grid\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>"
                            "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%.6g</text>\n",
                            X(rate), kTop, X(rate), kHeight - kBottom, X(rate),
                            kHeight - kBottom + 18, rate);
    }
    for (double power = low_; power <= high_ + 1e-9; power += 1) {
      const double us = std::pow(10, power);
      absl::StrAppendFormat(&svg,
                            "<line class=\"grid\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>"
                            "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n",
                            kLeft, Y(us), kWidth - kRight, Y(us), kLeft - 8, Y(us) + 4,
                            Duration(us));
    }
    absl::StrAppendFormat(
        &svg, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">requests per second</text>\n",
        (kLeft + kWidth - kRight) / 2, kHeight - 14);
    absl::StrAppendFormat(&svg,
                          "<text transform=\"translate(16 %.1f) rotate(-90)\" "
                          "text-anchor=\"middle\">latency (us, ms, s; logarithmic)</text>\n",
                          (kTop + kHeight - kBottom) / 2);
    return svg;
  }

 private:
  double step_ = 1, top_rate_ = 1, low_ = 0, high_ = 1;
};

std::string Curve(const Page& page, const Line& line, const std::vector<PointResult>& results) {
  std::string corners, marks;
  for (const PointResult& result : results) {
    const double us = Page::Us(result, line);
    if (us <= 0) continue;  // nothing was answered
    const double x = page.X(RatesOf(result.load).requests), y = page.Y(us);
    absl::StrAppendFormat(&corners, "%.1f,%.1f ", x, y);
    absl::StrAppendFormat(&marks,
                          "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\" fill=\"%s\">"
                          "<title>%s: %s %s</title></circle>\n",
                          x, y, line.color, result.point.Name(), line.name, Duration(us));
  }
  return absl::StrCat("<polyline fill=\"none\" stroke-width=\"2\" stroke=\"", line.color,
                      "\" points=\"", corners, "\"/>\n", marks);
}

// The load beside the lowest line's marks.
std::string Labels(const Page& page, const std::vector<PointResult>& results) {
  std::string svg;
  for (const PointResult& result : results) {
    const double us = Page::Us(result, kLines[0]);
    if (us <= 0) continue;
    absl::StrAppendFormat(&svg,
                          "<text class=\"load\" x=\"%.1f\" y=\"%.1f\" "
                          "text-anchor=\"middle\">%s</text>\n",
                          page.X(RatesOf(result.load).requests), page.Y(us) + 16,
                          result.point.Name());
  }
  return svg;
}

}  // namespace

std::string ToSvg(const std::string& title, const std::vector<PointResult>& results) {
  const Page page(results);
  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" width=\"%g\" "
      "height=\"%g\">\n<style>text{font:12px sans-serif;fill:#333}.load{font-size:10px;fill:#777}"
      ".title{font-size:15px}.grid{stroke:#ddd}</style>\n"
      "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n"
      "<text class=\"title\" x=\"%g\" y=\"22\">%s</text>\n",
      kWidth, kHeight, kWidth, kHeight, kLeft, Escaped(title));
  double x = kLeft;
  for (const Line& line : kLines) {
    absl::StrAppendFormat(&svg,
                          "<rect x=\"%g\" y=\"34\" width=\"12\" height=\"4\" fill=\"%s\"/>"
                          "<text x=\"%g\" y=\"41\">%s</text>\n",
                          x, line.color, x + 18, line.name);
    x += 80;
  }
  absl::StrAppend(&svg, page.Axes());
  for (const Line& line : kLines) absl::StrAppend(&svg, Curve(page, line, results));
  absl::StrAppend(&svg, Labels(page, results), "</svg>\n");
  return svg;
}

}  // namespace awqd::bench
