# Writes build_info.cpp. Run at every build (cmake -P), since the commit changes without CMake's
# knowledge; the file is touched only when its text changes.
set(commit "")
if(EXISTS ${SOURCE_DIR}/.git)
  execute_process(COMMAND git -C ${SOURCE_DIR} describe --always --abbrev=12 --exclude=* --dirty=+
                  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
set(rows "")
foreach(library IN LISTS LIBRARIES)
  string(REPLACE "=" ";" pair ${library})
  list(GET pair 0 name)
  list(GET pair 1 number)
  string(APPEND rows "{\"${name}\", \"${number}\"}, ")
endforeach()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT [[
#include "cli/build_info.h"

namespace agoq {

const BuildInfo& build_info() {
  static const BuildInfo info{"@VERSION@", "@commit@", "@COMPILER@", "@BUILD_TYPE@", {@rows@}};
  return info;
}

}  // namespace agoq
]] @ONLY)
