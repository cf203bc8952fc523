cmake_minimum_required(VERSION 3.20)
# SOURCE must compile as it stands, and with FOCUS_TEST_MISUSE defined fail with a message that matches the regular
# expression after "// expected error: " in it.
separate_arguments(flags UNIX_COMMAND "${FLAGS}")
file(STRINGS ${SOURCE} expected REGEX "^// expected error: ")
string(REPLACE "// expected error: " "" expected "${expected}")
if(expected STREQUAL "")
  message(FATAL_ERROR "${SOURCE} names no expected error.")
endif()

execute_process(COMMAND ${COMPILER} ${flags} -fsyntax-only ${SOURCE}
                RESULT_VARIABLE failed ERROR_VARIABLE output)
if(failed)
  message(FATAL_ERROR "${SOURCE} should compile without the misuse:\n${output}")
endif()

execute_process(COMMAND ${COMPILER} ${flags} -DFOCUS_TEST_MISUSE -fsyntax-only ${SOURCE}
                RESULT_VARIABLE failed ERROR_VARIABLE output)
if(NOT failed)
  message(FATAL_ERROR "${SOURCE} compiles with the misuse.")
endif()
if(NOT output MATCHES "${expected}")
  message(FATAL_ERROR "${SOURCE} fails for another reason than \"${expected}\":\n${output}")
endif()
