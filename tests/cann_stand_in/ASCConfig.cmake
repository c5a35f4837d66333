# What find_package(ASC) finds in CANN, in place of it: a language ASC, compiled by ./bisheng.
set(ASC_STAND_IN ${CMAKE_CURRENT_LIST_DIR})
list(APPEND CMAKE_MODULE_PATH ${CMAKE_CURRENT_LIST_DIR}/cmake)
