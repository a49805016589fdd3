#include "quant/format.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "quant/quant_tensor.h"

namespace agoq {
namespace {

std::string error_of(std::string_view text) {
  try {
    parse_format(text);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    return error.what();
  }
  return "";
}

TEST(Format, CodeTableIsInTheOrderOfTheEnum) {
  for (std::size_t i = 0; i < code_table().size(); ++i) {
    EXPECT_EQ(static_cast<std::size_t>(code_table()[i].code), i);
  }
  EXPECT_EQ(code_table().back().code, Code::kDynamic8Unsigned);
}

TEST(Format, EveryFormatIsReadBackFromItsText) {
  const std::vector<QuantFormat> formats = all_quantised_formats();
  EXPECT_EQ(formats.size(), 12u * 5u * 3u);
  for (QuantFormat format : formats) {
    EXPECT_EQ(parse_format(format.to_string()), format);
    format.rounding = Rounding::kStochastic;
    EXPECT_EQ(parse_format(format.to_string()), format);
  }
  for (const ElementType type :
       {ElementType::kFp64, ElementType::kFp32, ElementType::kBf16, ElementType::kFp16}) {
    const QuantFormat format = exact_format(type);
    EXPECT_TRUE(format.is_exact());
    EXPECT_EQ(element_type_of(format), type);
    EXPECT_EQ(parse_format(format.to_string()), format);
    EXPECT_EQ(format.to_string(), name_of(type));
  }
  EXPECT_THROW(exact_format(ElementType::kInt32), Error);
  EXPECT_THROW(element_type_of(parse_format("agoq")), Error);
}

TEST(Format, NamesStandForTheFormatsOfTheLiterature) {
  EXPECT_EQ(parse_format("agoq").to_string(), "nf4/32/two-level");
  EXPECT_EQ(parse_format("paper-fp4").to_string(), "bnbfp4/128/fp32");
  EXPECT_EQ(parse_format("authors-nf4").to_string(), "nf4/64/fp32");
  EXPECT_EQ(parse_format("authors-gradient").to_string(), "dynamic8/256/fp32");
}

TEST(Format, ErrorsSuggestTheNearestText) {
  EXPECT_NE(error_of("nf4/32/twolevel").find("'nf4/32/two-level'"), std::string::npos);
  EXPECT_NE(error_of("e4m3/129/fp32").find("'e4m3/128/fp32'"), std::string::npos);
  EXPECT_NE(error_of("paper-fp5").find("'paper-fp4'"), std::string::npos);
  EXPECT_NE(error_of("bf61").find("'bf16'"), std::string::npos);
  EXPECT_NE(error_of("int8/32/bf16/stochastik").find("'int8/32/bf16/stochastic'"), std::string::npos);
}

TEST(Format, ErrorsCompleteWhatIsCutShort) {
  const char* all = "did you mean 'nf4/32/fp32', 'nf4/32/bf16' or 'nf4/32/two-level'?";
  EXPECT_NE(error_of("nf4/32").find(all), std::string::npos) << error_of("nf4/32");
  EXPECT_NE(error_of("nf5/32").find(all), std::string::npos) << error_of("nf5/32");
  EXPECT_NE(error_of("nf4").find("did you mean 'nf4/BLOCK/SCALE' with a block of 16, 32, 64, 128 or 256 "
                                 "and a scale fp32, bf16 or two-level?"),
            std::string::npos)
      << error_of("nf4");
  EXPECT_NE(error_of("dynamic8/256").find("'dynamic8/256/fp32'"), std::string::npos);
  EXPECT_NE(error_of("ago").find("did you mean 'agoq'?"), std::string::npos) << error_of("ago");
}

TEST(Format, RefusesWhatIsNotAFormat) {
  for (const std::string_view text :
       {"", "/", "nf4", "nf4/32", "nf4/32/none", "nf4/0/fp32", "nf4/-32/fp32", "nf4/32x/fp32",
        "nf4/+32/fp32", "nf4/ 32/fp32", "nf4/99999999999/fp32", "bf16/32/fp32", "bf16/", "NF4/32/fp32",
        "nf4/32/fp32/nearest", "nf4/32/fp32/stochastic/stochastic"}) {
    EXPECT_NE(error_of(text), "") << text;
  }
}

TEST(Format, BitsPerElementIncludeScales) {
  EXPECT_DOUBLE_EQ(parse_format("nf4/32/two-level").bits_per_element(),
                   4 + 8.0 / 32 + 16.0 / 1024);  // 4.27
  EXPECT_DOUBLE_EQ(parse_format("e2m1/32/bf16").bits_per_element(), 4.5);
  EXPECT_DOUBLE_EQ(parse_format("nf4/64/bf16").bits_per_element(), 4.25);
  EXPECT_DOUBLE_EQ(parse_format("nf4/128/bf16").bits_per_element(), 4.125);
  EXPECT_DOUBLE_EQ(parse_format("int8/32/bf16").bits_per_element(), 8.5);
  EXPECT_DOUBLE_EQ(parse_format("int5/128/fp32").bits_per_element(), 5.25);
  EXPECT_DOUBLE_EQ(parse_format("int6/256/bf16").bits_per_element(), 6.0625);
  EXPECT_DOUBLE_EQ(parse_format("bf16").bits_per_element(), 16);
}

TEST(QuantTensor, BitsPerElementAreWhatWholeRowsTake) {
  for (const QuantFormat& format : all_quantised_formats()) {
    EXPECT_EQ(payload_bytes(format, {3, 4096, 1}) * 8, format.bits_per_element() * 3 * 4096)
        << format.to_string();
  }
}

TEST(QuantTensor, Llama3RowsTakeTheBytesOfTheMethod) {
  const QuantFormat format = parse_format("nf4/32/two-level");
  const RowBytes norm_input = row_bytes(format, {1, 4096, 1});
  EXPECT_EQ(norm_input.codes, 2048);
  EXPECT_EQ(norm_input.scales, 128);
  EXPECT_EQ(norm_input.super, 8);
  const RowBytes gate_up = row_bytes(format, {1, 28672, 2});
  EXPECT_EQ(gate_up.codes, 14336);
  EXPECT_EQ(gate_up.scales, 896);
  EXPECT_EQ(gate_up.super, 56);
  // Scales of a layer: two norm inputs, gate and up.
  EXPECT_EQ(2 * (norm_input.scales + norm_input.super) + gate_up.scales + gate_up.super, 1224);
  // 16 segments in each half: segments of 896 elements are shorter than a super-block, one scale each.
  const RowBytes cut = row_bytes(format, {1, 28672, 32});
  EXPECT_EQ(cut.codes, 14336);
  EXPECT_EQ(cut.scales, 896);
  EXPECT_EQ(cut.super, 64);
  EXPECT_EQ(row_bytes(format, {1, 4096, 16}).total(), 2048 + 128 + 32);
}

TEST(QuantTensor, SegmentsStartOnBytesAndShortBlocksHaveScales) {
  const RowBytes bytes = row_bytes(parse_format("int6/16/bf16"), {1, 51, 3});  // segments of 17 elements
  EXPECT_EQ(bytes.codes, 3 * 9);
  EXPECT_EQ(bytes.bits, 3 * 3 * 2);
  EXPECT_EQ(bytes.scales, 3 * 2 * 2);
  EXPECT_EQ(bytes.super, 0);
  EXPECT_EQ(row_bytes(parse_format("fp16"), {1, 51, 3}).total(), 102);
  EXPECT_THROW(row_bytes(parse_format("bf16"), {1, 50, 3}), Error);
}

TEST(QuantTensor, PlanesAreAlignedAndDisjoint) {
  for (const QuantFormat& format : all_quantised_formats()) {
    const BlockGrid grid{5, 77, 7};
    const RowBytes row = row_bytes(format, grid);
    alignas(kPlaneAlignment) static std::byte memory[4096];
    const QuantTensor tensor = place(format, grid, memory);
    ASSERT_LE(storage_bytes(format, grid), sizeof memory);
    EXPECT_GE(tensor.bits, tensor.codes + 5 * row.codes);
    EXPECT_GE(tensor.scales, tensor.bits + 5 * row.bits);
    EXPECT_GE(tensor.super, tensor.scales + 5 * row.scales);
    EXPECT_GE(memory + storage_bytes(format, grid), tensor.super + 5 * row.super);
    for (const std::byte* plane : {tensor.codes, tensor.bits, tensor.scales, tensor.super}) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(plane) % kPlaneAlignment, 0u);
    }
    const QuantTensor slice = tensor.slice_rows(2, 4);
    EXPECT_EQ(slice.rows(), 2);
    EXPECT_EQ(slice.codes, tensor.codes + 2 * row.codes);
    EXPECT_EQ(slice.scales, tensor.scales + 2 * row.scales);
    EXPECT_EQ(slice.super, tensor.super + 2 * row.super);
    EXPECT_THROW(tensor.exact(), Error);
    EXPECT_THROW(tensor.slice_rows(4, 6), Error);
  }
}

TEST(QuantTensor, AnExactTensorIsAQuantTensor) {
  float values[6] = {0, 1, 2, 3, 4, 5};
  const Tensor tensor{reinterpret_cast<std::byte*>(values), ElementType::kFp32, Shape{3, 2}};
  const QuantTensor view = as_quant_tensor(tensor);
  EXPECT_EQ(view.format, exact_format(ElementType::kFp32));
  EXPECT_EQ(view.slice_rows(1, 3).exact().as<float>()[1], 3.0f);
  EXPECT_FALSE(static_cast<bool>(QuantTensor{}));
}

}  // namespace
}  // namespace agoq
