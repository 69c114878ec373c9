// awqctl top: what a server does right now, from the difference of its counters between two polls.
#include <algorithm>
#include <deque>
#include <map>
#include <string>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/awqctl/commands.h"
#include "kernels/base/text.h"

namespace awqd::awqctl {
namespace {

constexpr size_t kBarColumns = 20;
constexpr size_t kTrendColumns = 50;
constexpr double kBusy = 0.9;  // the share from which a bar is yellow

// "[||||    ]  40 %"
std::string Bar(double share, bool colours) {
  share = std::clamp(share, 0.0, 1.0);
  const auto filled = static_cast<size_t>(share * kBarColumns + 0.5);
  const std::string bar = absl::StrFormat("[%s%s] %3.0f %%", std::string(filled, '|'),
                                          std::string(kBarColumns - filled, ' '), 100 * share);
  return share < kBusy || !colours ? bar : absl::StrCat(kYellow, bar, kNoColour);
}

// A line for each value, as high as it is beside the largest one.
std::string Trend(const std::deque<double>& values) {
  constexpr const char* kHeights[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  const double most = *absl::c_max_element(values);
  std::string out;
  for (const double value : values) {
    out += kHeights[most > 0 ? static_cast<size_t>(7 * std::max(0.0, value) / most + 0.5) : 0];
  }
  return out;
}

// The value that `share` of those that came between two polls do not pass, interpolated linearly
// within a bucket. "-" when none came.
std::string Quantile(const v1::Histogram& before, const v1::Histogram& now, double share) {
  int64_t total = 0;
  const auto count = [&](int i) {
    return now.counts(i) - (i < before.counts_size() ? before.counts(i) : 0);
  };
  for (int i = 0; i < now.counts_size(); ++i) total += count(i);
  const double wanted = share * static_cast<double>(total);
  double below = 0;
  for (int i = 0; total > 0 && i < now.bounds_size() && i < now.counts_size(); ++i) {
    const auto here = static_cast<double>(count(i));
    if (here > 0 && below + here >= wanted) {
      const double low = i == 0 ? 0 : now.bounds(i - 1);
      const double value = low + (now.bounds(i) - low) * (wanted - below) / here;
      return absl::StrFormat("%.2f ms", 1000 * value);
    }
    below += here;
  }
  if (total == 0 || now.bounds().empty()) return "-";
  return absl::StrFormat("> %.0f ms", 1000 * *now.bounds().rbegin());
}

// "12.3"; "-" of nothing.
std::string Mean(double sum, int64_t count) {
  return count > 0 ? absl::StrFormat("%.2f", sum / static_cast<double>(count)) : "-";
}

template <typename Counters>
std::map<std::string, Counters> ByName(
    const google::protobuf::RepeatedPtrField<Counters>& counters) {
  std::map<std::string, Counters> out;
  for (const Counters& one : counters) {
    if constexpr (requires { one.id(); }) {
      out[one.id()] = one;
    } else {
      out[one.name()] = one;
    }
  }
  return out;
}

// Two answers of a server, `seconds` apart. Bars, colours and trends are for terminals.
class Screen {
 public:
  Screen(const v1::GetServerInfoResponse& before, const v1::GetServerInfoResponse& now,
         double seconds)
      : before_(before), now_(now), seconds_(seconds) {}

  double CallsPerSecond() const {
    return PerSecond(before_.counters().calls(), now_.counters().calls());
  }
  // `trend`: calls a second of this screen and those before.
  std::string Text(const std::deque<double>& trend, const Console& console) const {
    return absl::StrCat(Head(console), console.out_terminal ? TrendLine(trend) + Bars(console) : "",
                        "\n", Devices().Text(console), "\n", Models().Text(console));
  }

 private:
  double PerSecond(int64_t before, int64_t now) const {
    // A server that was restarted counts from 0.
    const int64_t more = now >= before ? now - before : now;
    return static_cast<double>(more) / seconds_;
  }
  std::string Rate(int64_t before, int64_t now) const {
    return absl::StrFormat("%.1f/s", PerSecond(before, now));
  }
  double Busy(const v1::DeviceCounters& was, const v1::DeviceCounters& is) const {
    return std::max(0.0, is.compute_s() - was.compute_s()) / seconds_;
  }

  std::string Head(const Console& console) const {
    const v1::Counters &was = before_.counters(), &is = now_.counters();
    const std::string failed = absl::StrCat("failed ", Rate(was.failed_calls(), is.failed_calls()));
    const bool red = ShowsColours(console) && is.failed_calls() > was.failed_calls();
    return absl::StrCat("awqd ", OneLine(now_.version()), ", up ",
                        absl::FormatDuration(absl::Seconds(now_.uptime_s())),
                        console.out_terminal ? " (q quits)" : "", "\ncalls ",
                        Rate(was.calls(), is.calls()), ", ",
                        red ? absl::StrCat(kRed, failed, kNoColour) : failed, ", median ",
                        Quantile(was.request_calls(), is.request_calls(), 0.5), ", 99 % ",
                        Quantile(was.request_calls(), is.request_calls(), 0.99), "\nin flight ",
                        FormatBytes(is.in_flight_bytes()),
                        is.in_flight_limit_bytes() > 0
                            ? absl::StrCat(" of ", FormatBytes(is.in_flight_limit_bytes()))
                            : "",
                        ", memory of the process ", FormatBytes(is.resident_bytes()), "\n");
  }

  static std::string TrendLine(const std::deque<double>& trend) {
    return absl::StrFormat("calls/s, at most %.1f  %s\n", *absl::c_max_element(trend),
                           Trend(trend));
  }

  // How busy each device is, and how full its memory.
  std::string Bars(const Console& console) const {
    const bool colours = ShowsColours(console);
    std::string out;
    std::map<std::string, v1::DeviceCounters> before = ByName(before_.counters().devices());
    std::map<std::string, v1::DeviceStatus> memory = ByName(now_.devices());
    for (const v1::DeviceCounters& is : now_.counters().devices()) {
      const v1::DeviceStatus& status = memory[is.id()];
      const auto total = static_cast<double>(status.memory_total_bytes());
      const double taken = total - static_cast<double>(status.memory_free_bytes());
      absl::StrAppend(&out, OneLine(is.id()), "  busy ", Bar(Busy(before[is.id()], is), colours),
                      "  memory ", Bar(total > 0 ? taken / total : 0, colours), "\n");
    }
    return out;
  }

  Table Devices() const {
    Table table({"DEVICE", "REQUESTS", "TOKENS", "TOKENS/BATCH", "QUEUE", "WAITED", "BUSY", "FREE",
                 "WEIGHTS"});
    std::map<std::string, v1::DeviceCounters> before = ByName(before_.counters().devices());
    std::map<std::string, v1::DeviceStatus> memory = ByName(now_.devices());
    for (const v1::DeviceCounters& is : now_.counters().devices()) {
      const v1::DeviceCounters& was = before[is.id()];
      const v1::DeviceStatus& status = memory[is.id()];
      table.AddRow(
          {is.id(), Rate(was.requests(), is.requests()), Rate(was.tokens(), is.tokens()),
           Mean(static_cast<double>(is.tokens() - was.tokens()), is.batches() - was.batches()),
           absl::StrCat(is.queued_requests()), Quantile(was.queue(), is.queue(), 0.5),
           absl::StrFormat("%.0f %%", 100 * Busy(was, is)), FormatBytes(status.memory_free_bytes()),
           FormatBytes(status.weights_bytes())});
    }
    return table;
  }

  Table Models() const {
    Table table({"MODEL", "REQUESTS", "TOKENS", "FAILED", "WEIGHTS", "LOADED", "NOT SERVED"});
    std::map<std::string, v1::ModelCounters> before = ByName(before_.counters().models());
    for (const v1::ModelCounters& is : now_.counters().models()) {
      const v1::ModelCounters& was = before[is.name()];
      const int64_t missed = is.lost() + is.not_computed();
      const int64_t missed_before = was.lost() + was.not_computed();
      const absl::string_view colour = missed > missed_before      ? kRed
                                       : is.unserved_weights() > 0 ? kYellow
                                                                   : "";
      table.AddRow({is.name(), Rate(was.requests(), is.requests()), Rate(was.tokens(), is.tokens()),
                    Rate(missed_before, missed), FormatBytes(is.weights_bytes()),
                    absl::StrFormat("%.0f %%", 100 * is.loaded_share()),
                    absl::StrCat(is.unserved_weights())},
                   colour);
    }
    return table;
  }

  const v1::GetServerInfoResponse& before_;
  const v1::GetServerInfoResponse& now_;
  const double seconds_;
};

}  // namespace

absl::StatusOr<int> Top(const Flags& flags, client::Client& client, Console& console) {
  auto before = client.GetServerInfo(Deadline(flags));
  absl::Time then = absl::Now();
  if (!before.ok()) return before.status();
  const Interrupt interrupt;
  FullScreen screen(console, !flags.json);
  std::deque<double> trend;
  for (int64_t shown = 0; flags.screens == 0 || shown < flags.screens; ++shown) {
    if (screen.WaitForKey('q', flags.interval)) break;
    if (interrupt.signal_number() != 0) return 128 + interrupt.signal_number();
    auto now = client.GetServerInfo(Deadline(flags));
    if (!now.ok()) return now.status();
    const absl::Time at = absl::Now();
    const Screen next(*before, *now, std::max(1e-3, absl::ToDoubleSeconds(at - then)));
    trend.push_back(next.CallsPerSecond());
    if (trend.size() > kTrendColumns) trend.pop_front();
    // A signal has restored the terminal.
    if (interrupt.signal_number() != 0) return 128 + interrupt.signal_number();
    if (flags.json) {
      screen.Draw(ToJson(now->counters()));
    } else {
      const bool apart = shown > 0 && !console.out_terminal;
      screen.Draw(absl::StrCat(apart ? "\n" : "", next.Text(trend, console)));
    }
    if (!console.out.good()) break;
    before = std::move(now);
    then = at;
  }
  return kOk;
}

}  // namespace awqd::awqctl
