# The gate of action.yml: MODEL, BUILD, BASELINE, OPTIONS and COMMAND are its inputs. Leaves the
# result, JUnit XML and the summary in $RUNNER_TEMP/rollback; exit status 1 for new failures.
set -eu
folder="$RUNNER_TEMP/rollback"
mkdir -p "$folder"
command="${COMMAND:-$RUNNER_TEMP/draftscope/bin/draftscope}"
set -- --llama-cpp "$BUILD" --json --junit "$folder/junit.xml" --markdown "$folder/summary.md"
if [ "$MODEL" = demo ]; then
  set -- --demo "$@"
else
  set -- "$MODEL" "$@"
fi
if [ -n "$BASELINE" ]; then
  set -- "$@" --baseline "$BASELINE"
fi
status=0
# the options are words
# shellcheck disable=SC2086
"$command" check-rollback "$@" $OPTIONS > "$folder/result.json" || status=$?
{
  echo "result=$folder/result.json"
  echo "junit=$folder/junit.xml"
} >> "$GITHUB_OUTPUT"
if [ -f "$folder/summary.md" ]; then
  cat "$folder/summary.md" >> "$GITHUB_STEP_SUMMARY"
  cat "$folder/summary.md"
fi
exit "$status"
