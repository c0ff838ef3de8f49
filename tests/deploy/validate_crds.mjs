// Validate custom resources by the schemas of their CRDs: manifests as JSON on stdin, a line for each problem on stdout.
// Run as `node --input-type=module --eval TEXT` in the directory whose node_modules has @kubernetes-models.
import { readFileSync } from "node:fs";

const PACKAGES = {
  "monitoring.coreos.com": "prometheus-operator",
  "keda.sh": "keda",
  "gateway.networking.k8s.io": "gateway-api",
};
const problems = [];
for (const manifest of JSON.parse(readFileSync(0, "utf8"))) {
  const { apiVersion, kind, metadata } = manifest;
  const models = await import(`@kubernetes-models/${PACKAGES[apiVersion.split("/")[0]]}/${apiVersion}`);
  try {
    new models[kind](manifest).validate();
  } catch (error) {
    problems.push(`${kind} ${metadata.name}: ${error.message}`);
  }
}
console.log(problems.join("\n"));
process.exit(problems.length ? 1 : 0);
