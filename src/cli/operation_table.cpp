#include "cli/operation_table.h"

#include "cli/table.h"

namespace agoq {

std::string operation_table(const std::vector<OperationProfile>& operations) {
  double total = 0;
  for (const OperationProfile& operation : operations) total += operation.seconds;
  Table table({{"operation"},
               {"calls", Align::kRight},
               {"ms", Align::kRight},
               {"share", Align::kRight},
               {"TFLOP/s", Align::kRight},
               {"GB/s", Align::kRight}});
  for (const OperationProfile& operation : operations) {
    const auto rate = [&](double amount, double unit) {
      return amount == 0 ? std::string() : fmt::format("{:.4g}", amount / operation.seconds / unit);
    };
    table.add_row({operation.operation, std::to_string(operation.calls),
                   fmt::format("{:.3f}", 1e3 * operation.seconds),
                   fmt::format("{:.1f} %", 100 * operation.seconds / total), rate(operation.flops, 1e12),
                   rate(operation.bytes, 1e9)});
  }
  return table.to_string();
}

}  // namespace agoq
