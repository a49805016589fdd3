// What ranks tell each other before anything else: which agoq they are.
//
// Whatever another version exchanges would be misread, so its ranks have to be known before. A greeting
// is therefore the first that goes from rank to rank, over MPI (launch.cpp) and through files
// (nccl_id_file.cpp).
//
// Invariant: every version keeps its size, its place and its form, 128 bytes of text with zeros behind
// it that begin with "agoq ".
#pragma once

#include <array>
#include <span>
#include <string>

#include "comm/communicator.h"

namespace agoq {

using Greeting = std::array<char, 128>;

/// What ranks exchange, and in which order. To be raised with every change of it, so that two builds of
/// changed files, which have the same commit, are told apart.
inline constexpr int kRankProtocol = 1;

/// `program` names version and commit; what is too long of it is cut.
Greeting greeting_of(const std::string& program);

/// Which ranks run which program, as a message; empty where all run the same.
std::string difference_of(std::span<const Greeting> of_ranks);

/// The ranks' first exchange. Collective. Throws AgreedError (kInput, comm/together.h) where they do not
/// all run `program`.
void greet(Communicator& ranks, const std::string& program);

}  // namespace agoq
