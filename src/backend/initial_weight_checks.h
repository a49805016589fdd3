// Checks of Backend::initialise_weight's operands, the same for every backend.
#pragma once

#include "backend/backend.h"
#include "backend/operand_checks.h"

namespace agoq {

inline void check_initial_weight(const Tensor& initial, MasterKind kind, const Tensor& weight,
                                 const Tensor& master) {
  expect("initialise_weight", "initial", initial, ElementType::kFp32, weight.count());
  const bool has_master = weight.type == ElementType::kBf16 && kind != MasterKind::kNone;
  check(has_master == static_cast<bool>(master),
        "initialise_weight: a {} weight {} a master under this MasterKind", name_of(weight.type),
        has_master ? "needs" : "has not");
  if (has_master) {
    expect("initialise_weight", "master", master,
           kind == MasterKind::kFp32 ? ElementType::kFp32 : ElementType::kInt16, weight.count());
  }
}

}  // namespace agoq
